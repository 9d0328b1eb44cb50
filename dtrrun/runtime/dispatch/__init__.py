"""What C++ asks about the program's operators, and in which threads and turns they run."""
