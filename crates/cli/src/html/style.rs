//! The look of a page.

/// Light and dark, on paper, and on a telephone. Within bounds is blue and near the background, beyond them orange and
/// far from it, so that grey shades and any kind of colour blindness tell them apart.
pub const STYLE: &str = "
:root { color-scheme: light dark; --page: #fff; --ink: #1b1f24; --soft: #5a6472; --line: #d5dae1; --block: #f4f6f8;
  --good: #0b6bcb; --bad: #b3360b; --open: #7a5c00; --l0: #f3f6fa; --l1: #e3ebf4; --l2: #cbdaea; --l3: #f6a54a;
  --l4: #e06a10; --l5: #a23c05; --l6: #561803; --mark: #fff; --tile: #1b1f24 }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --ink: #dde2e8; --soft: #98a3b1; --line: #343b45;
  --block: #1d2228; --good: #6db3ff; --bad: #ff9a5c; --open: #e5c04b; --l0: #1c2229; --l1: #25303b; --l2: #314353;
  --l3: #b35a0c; --l4: #e8862c; --l5: #ffb86b; --l6: #ffe9cf; --mark: #14171b; --tile: #dde2e8 } }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif }
header, main { max-width: 68rem; margin: 0 auto; padding: 0 1rem }
header { margin-top: 1.5rem; padding: .6rem 1rem; border-left: .5rem solid var(--soft) }
header p { margin: 0; color: var(--soft) }
h1 { margin: 0; font-size: 1.35rem; line-height: 1.35; overflow-wrap: anywhere }
h2 { margin: 2.2rem 0 .6rem; font-size: 1.2rem; border-bottom: 1px solid var(--line) }
h3 { margin: 1.4rem 0 .4rem; font-size: 1rem; overflow-wrap: anywhere }
p, li, summary { overflow-wrap: anywhere }
p { margin: .4rem 0 }
header.passed { border-color: var(--good) } header.failed { border-color: var(--bad) }
header.undecided { border-color: var(--open) }
.failed { color: var(--bad) } .undecided { color: var(--open) } header.failed, header.undecided { color: inherit }
td.failed, td.undecided { font-weight: 600 }
.wide { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: .15rem 1rem .15rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line) }
th { color: var(--soft); font-weight: 600 } th, .short { white-space: nowrap }
pre { margin: .4rem 0; padding: .6rem; background: var(--block); font: .85rem/1.45 ui-monospace, monospace;
  white-space: pre-wrap; overflow-wrap: anywhere }
details { margin: .3rem 0; border-left: 2px solid var(--line); padding-left: .8rem } summary { cursor: pointer }
.left { color: var(--open) }
.figures { display: flex; flex-wrap: wrap; gap: 1rem 2.5rem; margin: .6rem 0 1rem }
figure { margin: 0; max-width: 100% } figcaption { max-width: 30rem; color: var(--soft); font-size: .85rem }
svg { display: block; max-width: 100%; height: auto } svg text { fill: var(--soft); font: 11px system-ui, sans-serif }
.l0 { fill: var(--l0) } .l1 { fill: var(--l1) } .l2 { fill: var(--l2) } .l3 { fill: var(--l3) } .l4 { fill: var(--l4) }
.l5 { fill: var(--l5) } .l6 { fill: var(--l6) }
.edge, .tile, .x { fill: none; stroke: var(--soft); stroke-width: 1px; vector-effect: non-scaling-stroke }
.tile { stroke: var(--tile); stroke-opacity: .55; stroke-dasharray: 4 3 } .x { stroke: var(--mark); stroke-width: 1.5px }
.key { display: flex; flex-wrap: wrap; gap: .1rem .9rem; margin: .3rem 0 0; padding: 0; list-style: none }
.key svg { display: inline-block; margin-right: .3rem }
.in { fill: var(--good) } .out { fill: var(--bad) }
@media (max-width: 40rem) { td, th { padding-right: .5rem } }
@media print { details > * { display: block } }
";
