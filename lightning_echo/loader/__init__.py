"""`EchoLoader`: epochs, their length, counts, the state, and how a run resumes."""
