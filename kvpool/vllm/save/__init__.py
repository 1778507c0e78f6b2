"""What is stored, when, and for how long. Only this room plans stores."""
