"""``moe run``: one command from a name to a served model.

`facts` looks at the model, `choice` decides by a pure function, `command` says what and why,
converts where needed, and serves.
"""
