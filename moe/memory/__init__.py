"""What a model will take and how fast it will be, before it is loaded."""
