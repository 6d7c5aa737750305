"""``moe calibrate``: watch a model read text, and learn from it where its tokens go next."""
