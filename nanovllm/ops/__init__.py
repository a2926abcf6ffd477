"""The arithmetic: one folder for each operation.

``reference.py`` says in plain PyTorch what the operation means; other files compute the same faster; the folder's
``__init__.py`` is the front door, which picks one. An operation takes tensors and numbers and knows nothing of the
rest of the package, so that each can be read, tested, timed and replaced alone.
"""
