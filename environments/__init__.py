"""The room of environments: tasks in which the policy acts in several turns."""
