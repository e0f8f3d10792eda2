"""One run from outside: checks, folder, state, resume, progress, callbacks."""
