package main

import (
	"flag"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"crust.dev/crust/csiplugin"
	"crust.dev/crust/csiplugin/backing/images"
)

// imageFlags are the flags for backing images.
func imageFlags(flags *flag.FlagSet, cfg *csiplugin.ImagesConfig) {
	flags.Var((*prefixes)(&cfg.AllowCIDRs), "image-allow-cidr", "`range` of addresses that backing images may be downloaded from although it is not public; may be given several times, or with commas")
	flags.Var((*names)(&cfg.AllowHosts), "image-allow-host", "`name` of a host that backing images may be downloaded from whatever its address is; may be given several times, or with commas")
	cfg.MaxSize = images.DefaultMaxSize
	flags.Var((*size)(&cfg.MaxSize), "image-max-size", "largest `size` of a backing image, as a file and as a disk, in bytes or with Ki, Mi, Gi or Ti")
	flags.DurationVar(&cfg.DownloadTime, "image-download-timeout", 6*time.Hour, "how long one download may take")
	flags.DurationVar(&cfg.ConvertTime, "image-convert-timeout", 6*time.Hour, "how long one conversion may take")
	flags.IntVar(&cfg.ConvertUID, "image-convert-uid", 65534, "user `id` without rights that conversions run with")
}

// prefixes is a flag: ranges of addresses.
type prefixes []netip.Prefix

func (p *prefixes) String() string { return fmt.Sprint(*p) }

func (p *prefixes) Set(text string) error {
	for part := range strings.SplitSeq(text, ",") {
		prefix, err := netip.ParsePrefix(part)
		if err != nil {
			return fmt.Errorf("want a range like 10.0.0.0/8: %w", err)
		}
		if prefix != prefix.Masked() {
			return fmt.Errorf("%s has bits beyond its length; want %s", part, prefix.Masked())
		}
		*p = append(*p, prefix)
	}
	return nil
}

// names is a flag: names of hosts.
type names []string

func (n *names) String() string { return strings.Join(*n, ",") }

func (n *names) Set(text string) error {
	for part := range strings.SplitSeq(text, ",") {
		if part == "" || strings.ContainsAny(part, "/:@ ") {
			return fmt.Errorf("%q is no name of a host", part)
		}
		*n = append(*n, part)
	}
	return nil
}
