"""Expert caches on recorded routings and simulated disks: policies, predictors, tiers."""
