"""The live dashboard: shows run folders of running, finished and crashed runs, and writes nothing."""
