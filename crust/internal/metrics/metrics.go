// Package metrics is what crustd tells Prometheus. Labels come from closed sets: no volume, pod or path is ever one.
package metrics

import (
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"google.golang.org/grpc/codes"

	"crust.dev/crust/crust/internal/journal"
)

// Metrics are the daemon's. The zero value is not ready; use [New].
type Metrics struct {
	Registry *prometheus.Registry

	published     prometheus.Counter
	calls         *prometheus.HistogramVec
	findings      *prometheus.CounterVec
	registrations *prometheus.CounterVec
	configuration prometheus.Gauge
}

// New returns metrics, with a gauge of the deferrals that list returns at each scrape.
func New(list func() []journal.Record) *Metrics {
	m := &Metrics{
		Registry: prometheus.NewRegistry(),
		published: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "volumes_published_with_deferred_ops_total",
			Help: "Volumes that were published for a sandbox to mount (KEP-2857).",
		}),
		calls: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "crust_rpc_duration_seconds",
			Help:    "Calls that the daemon has answered, by method and status code.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 15, 60, 120},
		}, []string{"method", "code"}),
		findings: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "crust_reconcile_findings_total",
			Help: "What the reconciler has put right or left, by kind.",
		}, []string{"kind"}),
		registrations: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "crust_kubelet_registrations_total",
			Help: "Answers of the kubelet to registrations of drivers, by result.",
		}, []string{"result"}),
		configuration: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "crust_configuration_applied",
			Help: "1 while the daemon works with what its configuration file says, 0 if the file has changed and is invalid or needs a restart.",
		}),
	}
	m.configuration.Set(1)
	m.Registry.MustRegister(m.published, m.calls, m.findings, m.registrations, m.configuration, deferrals{list},
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// Call notes a call. Methods that nobody has, of which there may be any number, are counted as one.
func (m *Metrics) Call(method string, code codes.Code, took time.Duration) {
	if code == codes.Unimplemented || !strings.HasPrefix(method, "/csi.v1.") && !strings.HasPrefix(method, "/crust.") {
		method = "other"
	}
	m.calls.WithLabelValues(method, code.String()).Observe(took.Seconds())
}

// Published notes that a volume was deferred.
func (m *Metrics) Published() { m.published.Inc() }

// Finding notes a finding of the reconciler.
func (m *Metrics) Finding(kind string) { m.findings.WithLabelValues(kind).Inc() }

// Configuration notes whether the daemon works with what its configuration file says.
func (m *Metrics) Configuration(applied bool) {
	value := 0.0
	if applied {
		value = 1
	}
	m.configuration.Set(value)
}

// Registration notes an answer of the kubelet.
func (m *Metrics) Registration(accepted bool) {
	result := "refused"
	if accepted {
		result = "accepted"
	}
	m.registrations.WithLabelValues(result).Inc()
}

// deferrals counts the records at each scrape, by handler and state.
type deferrals struct{ list func() []journal.Record }

var deferralsDesc = prometheus.NewDesc("crust_deferrals", "Deferrals on this node, by runtime handler and state.", []string{"handler", "state"}, nil)

// Describe is for prometheus.Collector.
func (deferrals) Describe(ch chan<- *prometheus.Desc) { ch <- deferralsDesc }

// Collect is for prometheus.Collector.
func (d deferrals) Collect(ch chan<- prometheus.Metric) {
	type key struct{ handler, state string }
	count := map[key]int{}
	for _, rec := range d.list() {
		count[key{rec.Handler, rec.Phase()}]++
	}
	for k, n := range count {
		ch <- prometheus.MustNewConstMetric(deferralsDesc, prometheus.GaugeValue, float64(n), k.handler, k.state)
	}
}
