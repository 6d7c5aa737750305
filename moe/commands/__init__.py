"""The `moe` command's parts: arguments, subcommands, the terminal, the doctor."""
