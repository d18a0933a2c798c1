"""What all of the engine uses: argument checks, URLs, the event loop, open files.

It imports nothing else of the package but its errors.
"""
