package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"crust.dev/crust/cmd/internal/output"
)

// silence is how long a call may take before a person at a terminal is told that it still goes on.
const silence = 2 * time.Second

// patience tells a person at a terminal, and nobody else, how long a call has taken so far. The function that it returns
// ends that and clears the line.
func patience(cmd *cobra.Command) (end func()) {
	f, ok := cmd.ErrOrStderr().(*os.File)
	if !ok {
		return func() {}
	}
	if info, err := f.Stat(); err != nil || info.Mode()&os.ModeCharDevice == 0 {
		return func() {}
	}
	return tell(f, silence)
}

func tell(w io.Writer, every time.Duration) (end func()) {
	start := time.Now()
	ticker := time.NewTicker(every)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		told := false
		for {
			select {
			case <-ticker.C:
				told = true
				fmt.Fprintf(w, "\rwaiting for crustd and its sandboxes, %s so far ", output.Age(time.Since(start)))
			case <-stop:
				if told {
					fmt.Fprint(w, "\r\x1b[K")
				}
				return
			}
		}
	}()
	return func() {
		ticker.Stop()
		close(stop)
		<-stopped
	}
}
