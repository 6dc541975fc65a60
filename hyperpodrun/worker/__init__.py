"""What runs inside a worker process before the user's script does."""
