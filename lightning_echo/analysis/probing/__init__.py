"""What is run to learn where the time goes: a loader alone, parts of it, a short training.

In: copies of a model and its data. Out: seconds and bytes (``measured``). May import: ``training`` and below. A change must not
break: whatever is run leaves no trace in the user's objects, files and random states.
"""
