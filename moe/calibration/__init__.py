"""What calibration leaves beside a model, and how loading reads it."""
