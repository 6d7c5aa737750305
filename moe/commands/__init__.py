"""The ``moe`` command's subcommands.

`arguments` declares their options, `subcommands` runs them: each imports the module that does the
work (`chat`, `terminal` for generate, `batch`, `bench`, `doctor`, `calibrate/`, `convert/`,
`evaluate/`, `plan/`, `trace/`). `console` is what they print on.
"""
