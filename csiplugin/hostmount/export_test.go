package hostmount

// FindMount is findMount.
var FindMount = findMount
