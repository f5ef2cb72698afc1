"""Scalable oversight: a weak judge decides between two answers after direct questions, a consultancy or a debate.

Kenton et al. 2024 (2407.04622), which builds on Khan et al. 2024 (2402.06782). Nothing here speaks to a model by
itself: protocols yield what is to be asked, players answer.
"""
