//! How long kernels take to compile.

use crate::family::Family;
use crate::variant::Compilation;

/// How long NVRTC 13.0 takes about for a kernel of a compilation, in µs, by the times of 1800 kernels.
pub(crate) fn effort((architecture, variant): &Compilation, kernel: &str) -> u64 {
    let of_architecture = match *architecture {
        "sm_90" => 103,
        "sm_100" => 112,
        "sm_120" => 113,
        _ => 100,
    };
    let of_family = percents(variant.family);
    let percent = |choice: &str| number(of_family, choice).unwrap_or(100);
    let options = variant.defines.iter().map(|(name, value)| format!("{name}={value}"));
    let choices = options.chain([architecture.to_string()]);
    let all = choices.flat_map(|x| [percent(&x), percent(&format!("{kernel}.{x}"))]);
    let least = number(milliseconds(variant.family), kernel).unwrap_or(25);
    all.chain([of_architecture]).fold(1000 * least, |effort, percent| effort * percent / 100)
}

/// The number that follows a word.
fn number(text: &str, word: &str) -> Option<u64> {
    let rest = text.split(' ').find_map(|part| part.strip_prefix(word)?.strip_prefix(':'))?;
    rest.parse().ok()
}

/// What options do to the time, of a kernel that is named or of each, and architectures beside what they do in every family.
fn percents(family: Family) -> &'static str {
    match family {
        Family::Portable => {
            "CD=128:118 CD=256:112 CE=128:129 CE=256:122 OPTIONS=1:125 R=8:123 VALUES=1:136 \
             sm_86:104 sm_90:107 collect.VALUES=1:59 dbias.R=8:141 delta.VALUES=1:233 \
             forward.CE=256:198 forward.R=8:154 queries.CE=128:67 queries.CE=256:51"
        }
        Family::Second => {
            "CD=128:89 CE=128:93 CE=256:80 OPTIONS=1:131 R=8:123 STORAGE=2:97 VALUES=1:191 \
             gbias.R=8:145 gsinks.VALUES=1:60 keys.CE=256:144 keys.sm_100:86 \
             queries.CE=128:80 rows.VALUES=1:308 tangents.CD=256:82 tangents.CE=256:195"
        }
        Family::Lazy => {
            "CD=128:114 CD=256:118 CE=128:118 CE=256:110 OPTIONS=1:109 R=8:194 VALUES=1:130 \
             sm_100:93 sm_89:95 inspect.R=8:64 keys.CE=256:140 queries.CD=256:163 \
             values.CE=256:168"
        }
        Family::LazyTensor => {
            "CD=128:110 CE=128:122 OPTIONS=1:144 STORAGE=1:108 STORAGE=2:113 sm_100:89 \
             sm_120:87 sm_86:92 sm_89:89 keys.OPTIONS=1:81 values.CE=128:128"
        }
        Family::HopperLazyForward => "D=128:118",
        Family::HopperLazyBackward => "D=128:140",
        Family::Tensor => {
            "CD=128:118 CD=256:54 CE=128:117 OPTIONS=1:138 STORAGE=1:108 STORAGE=2:112 \
             TILES=1:79 VALUES=1:106 WHOLE=1:96 forward.TILES=2:61 forward.VALUES=1:214 \
             keys.VALUES=1:138 values.CD=128:72 values.TILES=1:129"
        }
        Family::TensorFused => {
            "CD=128:121 CE=128:136 OPTIONS=1:130 STORAGE=2:107 VALUES=1:132 WHOLE=1:111 \
             sm_120:86 sm_86:86 sm_89:107 sm_90:89"
        }
        Family::TensorWide => {
            "CD=256:142 OPTIONS=1:114 STAGES=1:108 STORAGE=1:99 VALUES=1:120 sm_100:91 \
             sm_120:94 sm_86:105 values.CD=128:179"
        }
        Family::TensorF32 => {
            "BF16X3=1:107 CD=128:132 CE=128:160 OPTIONS=1:116 VALUES=1:134 sm_120:90 \
             forward.VALUES=1:155 queries.CE=128:71"
        }
        Family::TensorSecond => {
            "CD=128:124 CE=128:136 OPTIONS=1:153 STORAGE=1:113 VALUES=1:161 WHOLE=1:93 \
             sm_100:86 sm_120:91 sm_86:115 queries.CE=128:60"
        }
        Family::HopperForward => {
            "D=128:140 GROUPS=2:92 GROUPS=3:113 LENGTHS=1:136 LENGTHS=2:133 OPTIONS=1:365 \
             STORAGE=1:89 STORAGE=2:117 VALUES=1:218 WINDOW=1:168"
        }
        Family::HopperBackward => {
            "D=128:115 LENGTHS=1:115 OPTIONS=1:474 RESULTS=2:69 STORAGE=2:112 WINDOW=1:172 \
             cleanse.OPTIONS=1:28 delta.OPTIONS=1:28 merge.OPTIONS=1:29"
        }
        Family::Linear => {
            "CW=128:145 CW=256:136 R=8:103 STORAGE=1:106 flow.CW=128:64 flow.CW=256:49"
        }
        Family::LinearSecond => {
            "CW=128:149 CW=256:311 STORAGE=1:89 STORAGE=2:92 sm_120:93 \
             flow_second.CW=128:69 flow_second.CW=256:33 scan_second.CW=256:40"
        }
        Family::CrossEntropy => "SECOND=1:139 sm_100:136 sm_120:127 sm_86:107",
        Family::CrossEntropyShards => "sm_100:125 sm_120:118",
        Family::HopperCrossEntropy => "STORAGE=1:118 STORAGE=2:117",
        Family::LinearTensor => {
            "CW=128:105 KW=128:104 STORAGE=2:101 sm_100:114 sm_120:115 sums.CW=128:173 \
             sums.KW=128:155"
        }
        Family::HopperLinear => "BY_TOKEN=1:127 STORAGE=1:113 STORAGE=2:127",
        Family::Moves => "sm_100:113 sm_120:110 sm_90:109",
        Family::Peak => "sm_100:114 sm_120:112 sm_86:94",
        Family::Tables => "",
        Family::TensorPeak => "sm_120:110",
        Family::HopperPeak => "STORAGE=1:110 STORAGE=2:93",
    }
}

/// The time of kernels without these.
fn milliseconds(family: Family) -> &'static str {
    match family {
        Family::Portable => "collect:40 dbias:140 forward:140 keys:400 queries:450 fused:500",
        Family::Second => "gsinks:40 gbias:320 tangents:360 queries:500 keys:550 fused:750",
        Family::Lazy => {
            "counts:80 measure:80 inspect:90 scores:120 values:200 queries:380 keys:400"
        }
        Family::LazyTensor => "means:200 scores:220 queries:380 values:550 keys:700",
        Family::HopperLazyForward => "scores:300 values:380 sums:400",
        Family::HopperLazyBackward => "keys:850 queries:1200",
        Family::Tensor => "dbias:180 forward:220 queries:300 keys:360 values:600",
        Family::TensorFused => "fused:450",
        Family::TensorWide => "values:320 queries:400 keys:450",
        Family::TensorF32 => "forward:240 queries:340 keys:400",
        Family::TensorSecond => "tangents:140 queries:200 keys:240",
        Family::HopperForward => "forward:240",
        Family::HopperBackward => "keys:180 values:260 queries:300",
        Family::Linear => "step:60 scan:70 sums:240 mend_sums:260 flow:650 attend:1050 mend:1200",
        Family::LinearSecond => {
            "scan_second:80 tangent_sums:260 flow_second:500 attend_second:1050"
        }
        Family::CrossEntropy => {
            "norms:40 finish:60 tokens:60 totals:80 logits:240 hidden:280 head:300 \
             motions:340"
        }
        Family::HopperCrossEntropy => {
            "hidden_192:260 hidden:360 head:750 leaves:850 tree:850 gradient:1250"
        }
        Family::LinearTensor => "sums:140 attend:600 flow:650",
        Family::HopperLinear => {
            "scan:60 sums:160 sums_back:180 flow:380 attend_plain:650 attend:700 \
             attend_back:800 attend_dots:950 attend_back_dots:1000"
        }
        Family::Moves => "move:40",
        Family::Tables => "rows:70 sequences:70",
        Family::HopperPeak => "peak:90",
        _ => "",
    }
}
