"""How the index learns what workers and pool hold, how busy workers are and what they serve, and stays exact."""
