"""Names of other packages that are private to them: all that swath uses of these is in here.

A new version of a package may rename or drop them without a word. Each function here says what it
needs in plain terms, and has another way where there is one, which is slower or does without a
shortcut. `tests/test_compat.py` names the version that has broken something.
"""
