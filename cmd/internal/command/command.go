// Package command is what all commands of this project do alike: a root command with --version and logging flags, an
// end on SIGINT and SIGTERM, and an exit code.
package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	containerdlog "github.com/containerd/log"
	"github.com/spf13/cobra"
)

// version is set by the linker for releases.
var version = ""

// Version returns the version of the build: that of the release, or what Go has noted of the commit.
func Version() string {
	if version != "" {
		return version
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	v := info.Main.Version
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && (v == "" || v == "(devel)") {
			v = s.Value
		}
	}
	if v == "" || v == "(devel)" {
		return "development"
	}
	return v
}

// Main runs a command until it ends or a signal comes, and exits. A second signal ends the process at once.
func Main(root *cobra.Command) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	root.Version = Version()
	root.SilenceUsage = true
	root.SilenceErrors = true
	// ttrpc logs every closed connection as an error, past our logger.
	_ = containerdlog.SetLevel("fatal")
	if err := root.ExecuteContext(ctx); err != nil {
		var exit *ExitError
		if errors.As(err, &exit) {
			os.Exit(exit.Code)
		}
		fmt.Fprintf(os.Stderr, "%s: %v\n", root.Name(), err)
		os.Exit(1)
	}
}

// ExitError ends a command with an exit code of its own, and without a message.
type ExitError struct{ Code int }

func (e *ExitError) Error() string { return fmt.Sprintf("exit code %d", e.Code) }

// Logging are the flags for the log.
type Logging struct {
	level  string
	format string
}

// Flags adds --log-level and --log-format to a command.
func (l *Logging) Flags(cmd *cobra.Command) {
	cmd.PersistentFlags().StringVar(&l.level, "log-level", "info", "least level to log: debug, info, warn, error")
	cmd.PersistentFlags().StringVar(&l.format, "log-format", "text", "text or json")
}

// Logger returns the logger that the flags ask for.
func (l *Logging) Logger(w io.Writer) (*slog.Logger, error) {
	level, err := ParseLevel(l.level)
	if err != nil {
		return nil, err
	}
	return NewLogger(w, level, l.format)
}

// ParseLevel reads a value of --log-level.
func ParseLevel(text string) (slog.Level, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(text)); err != nil {
		return 0, fmt.Errorf("--log-level %q: want debug, info, warn or error", text)
	}
	return level, nil
}

// NewLogger returns a logger in one of the formats of --log-format.
func NewLogger(w io.Writer, level slog.Leveler, format string) (*slog.Logger, error) {
	options := &slog.HandlerOptions{Level: level}
	switch format {
	case "text":
		return slog.New(slog.NewTextHandler(w, options)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, options)), nil
	}
	return nil, fmt.Errorf("--log-format %q: want text or json", format)
}
