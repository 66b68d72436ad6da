"""What is asked of a server, and what a user would see of its answers.

workload, lengths, prompts, arrivals -> schedule (made whole before the first send), or trace -> schedule;
client sends it and measures from the scheduled arrival; driver does so from a process of its own. No torch,
no pandas.
"""
