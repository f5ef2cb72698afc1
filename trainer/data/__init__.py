"""What a run learns from: files of problems, demonstrations and offline rows, read and checked."""
