"""Scalable oversight as an evaluation: do weak judges find the right answer by debate, consultancy or by themselves?"""
