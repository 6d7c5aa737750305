"""How far to draft, and how: one goodput function, fitted while steps are measured."""
