package images

import (
	"github.com/prometheus/client_golang/prometheus"

	"crust.dev/crust/csiplugin/catalog"
)

// metrics are what a store tells Prometheus. Labels come from closed sets.
type metrics struct {
	results *prometheus.CounterVec
	bytes   *prometheus.CounterVec
	now     *prometheus.GaugeVec
	store   *Store
}

func newMetrics(s *Store) *metrics {
	m := &metrics{
		results: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "crust_image_preparations_total", Help: "Attempts to prepare a backing image that have ended, by result.",
		}, []string{"result"}),
		bytes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "crust_image_prepared_bytes_total", Help: "Bytes that were processed for backing images, by phase.",
		}, []string{"phase"}),
		now: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "crust_images", Help: "Backing images, by state; those that are being prepared by phase.",
		}, []string{"state"}),
		store: s,
	}
	for _, result := range []string{"ready", "failed"} {
		m.results.WithLabelValues(result)
	}
	return m
}

func (m *metrics) ended(err error) {
	result := "ready"
	if err != nil {
		result = "failed"
	}
	m.results.WithLabelValues(result).Inc()
}

// Describe is that of prometheus.Collector.
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	m.results.Describe(ch)
	m.bytes.Describe(ch)
	m.now.Describe(ch)
}

// Collect is that of prometheus.Collector.
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	m.now.Reset()
	for _, phase := range phases {
		m.now.WithLabelValues(string(phase))
	}
	m.now.WithLabelValues(string(catalog.Ready))
	m.now.WithLabelValues("failed")
	if list, err := m.store.List(); err == nil {
		for _, st := range list {
			state := string(st.State)
			switch {
			case st.Progress != nil:
				state = string(st.Progress.Phase)
			case st.Fault != nil:
				state = "failed"
			}
			m.now.WithLabelValues(state).Inc()
		}
	}
	m.results.Collect(ch)
	m.bytes.Collect(ch)
	m.now.Collect(ch)
}

// meter counts what a phase of a job has done, as it goes on, and notes it as progress.
func (m *metrics) meter(j *job, phase Phase) func(done, total int64) {
	counter := m.bytes.WithLabelValues(string(phase))
	var last int64
	j.at(Progress{Phase: phase})
	return func(done, total int64) {
		if done > last {
			counter.Add(float64(done - last))
		}
		last = done
		j.at(Progress{Phase: phase, Done: done, Total: total})
	}
}
