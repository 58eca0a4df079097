package configfile

import "go.yaml.in/yaml/v4"

// Handler is one of the handlers: its kind, its name, and settings that depend on the kind.
type Handler struct {
	Kind string
	Name string // empty: that of the kind

	source   source
	path     string
	settings *yaml.Node // what there is beside kind and name
}

// handler reads what all kinds have.
func (d *decoder) handler(n *yaml.Node, h *Handler, path string) {
	h.source, h.path = d.source, path
	settings := *n
	settings.Content = nil
	d.pairs(n, path, func(key, value *yaml.Node) {
		var into *string
		switch key.Value {
		case "kind":
			into = &h.Kind
		case "name":
			into = &h.Name
		default:
			settings.Content = append(settings.Content, key, value)
			return
		}
		d.decode(value, into, path+"."+key.Value)
	})
	if n.Kind == yaml.MappingNode && !d.Has(path+".kind") {
		d.fail(n, "%s has no kind", path)
	}
	h.settings = &settings
}

// Settings puts the settings into the struct that into points to, whose fields have their keys in yaml tags and are
// texts, booleans, durations, lists and structs of these. Its errors are those of [Read].
func (h Handler) Settings(into any) error {
	if h.settings == nil {
		return nil
	}
	d := decoder{source: h.source}
	d.decode(h.settings, into, h.path)
	return d.err()
}

// Errorf returns an error about one of the handler's keys, or about all of it if the key is empty.
func (h Handler) Errorf(key, format string, args ...any) error {
	path := h.path
	if key != "" {
		path += "." + key
	}
	return h.source.Errorf(path, format, args...)
}
