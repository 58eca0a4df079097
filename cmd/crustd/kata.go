package main

import (
	"time"

	"crust.dev/crust/crust"
	"crust.dev/crust/crust/configfile"
	"crust.dev/crust/runtimehandler"
	"crust.dev/crust/runtimehandler/kata"
	"crust.dev/crust/runtimehandler/kata/assist"
	"crust.dev/crust/runtimehandler/kata/config"
)

// kataSettings are the settings of a handler of kind kata; see kata.Config.
type kataSettings struct {
	Runtime       string        `yaml:"runtime"`
	Root          string        `yaml:"root"`
	CRIEndpoint   string        `yaml:"criEndpoint"`
	FSTypes       []string      `yaml:"fsTypes"`
	HostAssist    []string      `yaml:"hostAssist"`
	AssistTimeout time.Duration `yaml:"assistTimeout"`
	ProofTimeout  time.Duration `yaml:"proofTimeout"`
	CallTimeout   time.Duration `yaml:"callTimeout"`
}

func newKata(h configfile.Handler, _ crust.Config) (runtimehandler.Handler, error) {
	var s kataSettings
	if err := h.Settings(&s); err != nil {
		return nil, err
	}
	steps := make([]assist.Step, 0, len(s.HostAssist))
	for _, step := range s.HostAssist {
		steps = append(steps, assist.Step(step))
	}
	handler, err := kata.New(kata.Config{
		Name: h.Name, Runtime: config.Runtime(s.Runtime), Root: s.Root, CRIEndpoint: s.CRIEndpoint, FSTypes: s.FSTypes,
		HostAssist: steps, AssistTimeout: s.AssistTimeout, ProofTimeout: s.ProofTimeout, CallTimeout: s.CallTimeout,
	})
	if err != nil {
		return nil, h.Errorf("", "%v", err)
	}
	return handler, nil
}
