"""Generation: from a call to its completions.

``request`` makes one frozen request per prompt, ``completions`` checks them and returns
the outcomes, ``batch`` sends them together or alone, ``dispatch`` places, sends and
retries, and ``protocol`` writes payloads and reads replies. ``sampling`` is the table
of sampling parameters.
"""
