"""Generation: from a call to its completions.

``request`` makes one frozen request per prompt, ``batch`` checks them and returns their
outcomes, ``dispatch`` places, sends and retries each, and ``protocol`` writes payloads
and reads replies. ``sampling`` is the table of sampling parameters.
"""
