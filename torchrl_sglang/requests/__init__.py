"""Requests for responses, as all layers know them. Pure: nothing is sent here.

``sampling.py`` has the table of sampling parameters, ``request.py`` a request that is
checked and complete, and ``resume.py`` what remains of one after an abort.
"""
