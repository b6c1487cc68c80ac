"""The user's objects: copies, differences, fingerprints, random states. Nothing of the user's is changed."""
