package cli

import (
	"encoding/json"

	"crust.dev/crust/runtimehandler"
)

// RecordName is the name of a deferral's directory.
func RecordName(targetPath string) string { return recordName(targetPath) }

// ParseStats reads what a command has printed.
func ParseStats(raw []byte) (runtimehandler.Stats, error) {
	var a answer
	if err := json.Unmarshal(raw, &a); err != nil {
		return runtimehandler.Stats{}, err
	}
	return a.stats()
}
