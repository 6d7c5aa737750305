"""What a transformers model is, found by watching one pass and by trying: values that decode steps
run by."""
