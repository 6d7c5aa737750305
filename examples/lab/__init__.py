"""A laboratory for routers: the same small model, text and seeds, with one router after another."""
