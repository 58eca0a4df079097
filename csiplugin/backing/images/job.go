package images

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"

	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/protocol/rpc"
)

// Phase is what preparing an image is at.
type Phase string

// The phases, in their order.
const (
	Waiting     Phase = "waiting"
	Downloading Phase = "downloading"
	Converting  Phase = "converting"
	Publishing  Phase = "publishing"
)

var phases = []Phase{Waiting, Downloading, Converting, Publishing}

// Progress is how far preparing an image has come.
type Progress struct {
	Phase Phase
	// Done and Total are bytes of the phase; Total is 0 if it is not known.
	Done, Total int64
}

func (p Progress) String() string {
	switch {
	case p.Total > 0:
		return fmt.Sprintf("%s, %d of %d bytes (%d%%)", p.Phase, p.Done, p.Total, int(100*float64(p.Done)/float64(p.Total)))
	case p.Done > 0:
		return fmt.Sprintf("%s, %d bytes", p.Phase, p.Done)
	}
	return string(p.Phase)
}

// job prepares one image.
type job struct {
	image    catalog.Image
	cancel   context.CancelCauseFunc
	done     chan struct{}
	progress atomic.Pointer[Progress]
}

func (j *job) at(p Progress) { j.progress.Store(&p) }

// fault is what a job has failed of. It is told to one call.
type fault struct {
	image catalog.Image
	err   error
	told  bool
}

// logEvery is how often the log says how far a job is.
const logEvery = 10 * time.Second

// begin starts the job that prepares an image, whose lock the caller has. work ends with the image ready, or undoes what it
// did. It goes on when ctx has ended.
func (s *Store) begin(ctx context.Context, img catalog.Image, work func(ctx context.Context, j *job) error) (*job, error) {
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	j := &job{image: img, cancel: cancel, done: make(chan struct{})}
	j.at(Progress{Phase: Waiting})
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return nil, errStopped
	}
	delete(s.failed, img.Name)
	s.jobs[img.Name] = j
	s.running.Go(func() { s.work(ctx, j, work) })
	return j, nil
}

func (s *Store) work(ctx context.Context, j *job, work func(context.Context, *job) error) {
	defer j.cancel(nil)
	log := rpc.Logger(ctx).With(logImage, j.image.Name)
	log.InfoContext(ctx, "an image is being prepared", "source", string(j.image.Source), "format", string(j.image.Format))
	said := make(chan struct{})
	go func() {
		defer close(said)
		for tick := time.NewTicker(logEvery); ; {
			select {
			case <-ctx.Done():
				tick.Stop()
				return
			case <-tick.C:
				log.InfoContext(ctx, "an image is being prepared", "progress", j.progress.Load().String())
			}
		}
	}()
	start := time.Now()
	err := s.queue(ctx, func() error { return work(ctx, j) })
	if err != nil && ctx.Err() != nil && !errors.Is(err, context.Cause(ctx)) {
		err = fmt.Errorf("%w: %v", context.Cause(ctx), err)
	}
	j.cancel(nil)
	<-said
	s.ended(err)
	if err == nil {
		log.InfoContext(ctx, "an image is ready", rpc.LogDuration, time.Since(start))
	} else {
		log.WarnContext(ctx, "an image could not be prepared", rpc.LogError, err, rpc.LogDuration, time.Since(start))
	}
	s.mu.Lock()
	delete(s.jobs, j.image.Name)
	if err != nil {
		s.failed[j.image.Name] = &fault{image: j.image, err: fmt.Errorf("prepare image %q: %w", j.image.Name, err)}
	}
	s.mu.Unlock()
	close(j.done)
}

// queue waits for one of the slots.
func (s *Store) queue(ctx context.Context, work func() error) error {
	select {
	case s.slots <- struct{}{}:
		defer func() { <-s.slots }()
		return work()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// job returns the job of an image, or nil.
func (s *Store) job(name string) *job {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.jobs[name]
}

// fault returns what the last job of an image has failed of, once, if it was for this public handle: what somebody else's
// has failed of is not this caller's business.
func (s *Store) fault(name, handle string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.failed[name]
	if f == nil || f.told || f.image.Handle != handle {
		return nil
	}
	f.told = true
	return f.err
}

// stopJob ends the job of an image, whose lock the caller has, and waits for that.
func (s *Store) stopJob(ctx context.Context, name string) error {
	j := s.job(name)
	if j == nil {
		return nil
	}
	j.cancel(fmt.Errorf("image %q is being deleted: %w", name, errdefs.ErrAborted))
	select {
	case <-j.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("image %q is still being prepared, and is told to end that: %w", name, errdefs.ErrAborted)
	}
}

// forget drops what the last job of an image has failed of, and says whether there was anything.
func (s *Store) forget(name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, there := s.failed[name]
	delete(s.failed, name)
	return there
}

// Status is an image and how far preparing it is.
type Status struct {
	catalog.Image
	// Progress is nil unless it is being prepared now.
	Progress *Progress
	// Fault is what the last attempt has failed of, or nil.
	Fault error
}

// List returns all images, in the order of their names, with those that could not be prepared.
func (s *Store) List() ([]Status, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	all, err := s.Catalog.ImagesAfter("", nil, 0)
	if err != nil {
		return nil, err
	}
	var list []Status
	known := map[string]bool{}
	for _, img := range all {
		known[img.Name] = true
		st := Status{Image: img}
		if j := s.jobs[img.Name]; j != nil {
			st.Progress = j.progress.Load()
		}
		if f := s.failed[img.Name]; f != nil {
			st.Fault = f.err
		}
		list = append(list, st)
	}
	for name, f := range s.failed {
		if !known[name] {
			list = append(list, Status{Image: f.image, Fault: f.err})
		}
	}
	return list, nil
}
