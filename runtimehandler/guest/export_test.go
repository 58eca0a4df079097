package guest

import "crust.dev/crust/runtimehandler/guest/device"

// SetDevices has an agent look for devices elsewhere.
func (a *Agent) SetDevices(f device.Finder) { a.devices = f }

// Known is how many mount paths and serials an agent keeps.
func (a *Agent) Known() (volumes, serials, destinations int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.volumes), len(a.serials), len(a.destinations)
}
