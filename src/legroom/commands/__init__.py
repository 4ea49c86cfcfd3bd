"""What stands behind the commands that work on files: a trace in, a plan, a table or a timeline out."""
