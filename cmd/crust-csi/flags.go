package main

import (
	"fmt"
	"io"
	"log/slog"
	"strconv"
	"strings"
)

func logger(w io.Writer, level, format string) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, fmt.Errorf("log level %q: want debug, info, warn or error", level)
	}
	o := &slog.HandlerOptions{Level: l}
	switch format {
	case "text":
		return slog.New(slog.NewTextHandler(w, o)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, o)), nil
	}
	return nil, fmt.Errorf("log format %q: want text or json", format)
}

// size is a flag: bytes, with a binary unit or without.
type size int64

func (s *size) String() string { return strconv.FormatInt(int64(*s), 10) }

func (s *size) Set(text string) error {
	digits, shift := text, 0
	for unit, n := range map[string]int{"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40} {
		if rest, ok := strings.CutSuffix(text, unit); ok {
			digits, shift = rest, n
		}
	}
	n, err := strconv.ParseUint(digits, 10, 63-shift)
	if err != nil {
		return fmt.Errorf("want bytes, or a number with Ki, Mi, Gi or Ti")
	}
	*s = size(n << shift)
	return nil
}
