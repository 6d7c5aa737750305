"""Models that write canvases: expert sharing, policies of fewer passes, speed."""
