"""From a call to its responses.

``request`` turns arguments into one frozen request per prompt, ``completions`` gives
each the current weight version, ``dispatch`` sends it to a server and retries, and
``protocol`` knows how SGLang writes requests and replies.
"""
