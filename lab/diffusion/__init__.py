"""Models that write whole blocks: expert sharing, policies of fewer passes, speed."""
