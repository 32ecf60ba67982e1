r"""What talks to other workers or prepares their data."""
