"""Methods: published ways of doing something, one folder each. The core imports none of them.

    moe methods          lists them, with their price and whether a profile switches them on
    moe methods NAME     prints what a method is, its keys, and the command that measures it

A folder NAME has an ``__init__.py`` with

1. a docstring: the paper, the mechanism, what differs from the paper, what was measured, and the
   command that measures it;
2. ``METHOD = Method(...)`` (`moe.hooks.Method`): one line about it and its price, the keys that it
   adds to a profile as a subclass of `moe.section.Settings`, and its hooks as
   ``"moe.methods.NAME.module:attribute"``.

It imports nothing but `moe.hooks`, `moe.section` and pydantic, as it runs whenever a profile is
read; the other modules of the folder are imported when the method is switched on, and may import
any room. `routing.policies: [NAME:ARGUMENTS]` and other keys that name a way take the names that
methods add by `choices`. Everything else that a user may set is under ``methods.NAME``.

A method of one's own needs no change here: a package that is installed names its declaration as an
entry point of the group ``moe.methods``; examples/routing_policy is one.

To remove a method, delete its folder and its ``files``. ``python -m tests.without_method NAME``
does that in a copy of the tree, and shows that the rest still imports and type-checks.
"""
