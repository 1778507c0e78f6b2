"""How the index learns the blocks of workers and pool, and stays exact."""
