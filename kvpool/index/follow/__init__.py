"""How the index learns what workers and the pool hold, and keeps it true."""
