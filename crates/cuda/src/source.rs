//! The source of a variant: the texts of its family, with the kernel arguments that these name.

use crate::args::Definitions;
use crate::cache::Cache;
use crate::shared::shared_bytes;
use crate::variant::Variant;
use crate::{linear_attention, linear_cross_entropy, peak, softmax, step, strided};
use std::fmt::Write;

impl Variant {
    /// The source of some of its kernels. Messages of the compiler name the file and its line.
    pub fn source(&self, kernels: &[&str]) -> String {
        let (mut source, mut definitions) = (String::new(), Definitions::default());
        for (name, text) in self.family.texts() {
            let _ = writeln!(source, "#line 1 \"{name}\"");
            let mut copied = 0;
            for (begin, line) in marked_lines(text) {
                if let Some((of, _)) = line.strip_prefix(ARGUMENTS).and_then(|rest| rest.split_once(')')) {
                    source.push_str(&text[copied..begin]);
                    copied = (begin + line.len() + 1).min(text.len());
                    let defined = definitions.text.len();
                    define(of, &mut definitions);
                    let number = text[..copied].matches('\n').count() + 1;
                    let text = &definitions.text[defined..];
                    let _ = write!(source, "#line 1 \"arguments\"\n{text}#line {number} \"{name}\"\n");
                } else if let Some((_, declaration)) = kernel_of(line).filter(|(name, _)| !kernels.contains(name)) {
                    source.push_str(&text[copied..begin]);
                    source.push_str("LEFT_OUT(");
                    copied = begin + line.len() - declaration.len();
                }
            }
            source.push_str(&text[copied..]);
        }
        source
    }

    /// The options of the compiler, for an architecture.
    pub fn options(&self, architecture: &str) -> Vec<String> {
        let mut options = vec![
            format!("--gpu-architecture={architecture}"),
            "--std=c++17".to_string(),
            "-default-device".to_string(),
            "--ptxas-options=-v".to_string(),
        ];
        options.extend(self.defines.iter().map(|(name, value)| format!("-D{name}={value}")));
        // Sources assert that their layouts have these bytes: `CHECK_SHARED` of `tile/types.cuh`.
        let shared = self.kernels().into_iter().map(|name| (name, shared_bytes(self, name))).filter(|x| x.1 > 0);
        options.extend(shared.map(|(name, bytes)| format!("-DSHARED_{name}={bytes}")));
        if cfg!(feature = "racecheck") {
            options.push("-DARRIVALS=32".to_string()); // of `feed/barriers.cuh`
        }
        options
    }

    /// The name of a kernel's machine code in a cache or an archive: a hash of all that makes it.
    pub(crate) fn key(&self, kernel: &str, architecture: &str, nvrtc: &str) -> String {
        Cache::key(&[&self.source(&[kernel]), &self.options(architecture).join("\n"), nvrtc])
    }
}

/// The lines of a text that may declare a kernel or name kernel arguments, with where they begin. Texts are long, and
/// few lines are marked: they are searched for.
fn marked_lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.match_indices("KERNEL").filter_map(move |(at, _)| {
        let begin = text[..at].strip_suffix("CLUSTER_").map_or(at, str::len);
        let opens_line = begin == 0 || text[..begin].ends_with('\n');
        opens_line.then(|| (begin, text[begin..].lines().next().unwrap_or_default()))
    })
}

/// The name of the kernel that begins in a line of a source, and its declaration from there on.
fn kernel_of(line: &str) -> Option<(&str, &str)> {
    let declaration = ["KERNEL(", "CLUSTER_KERNEL("].iter().find_map(|beginning| line.strip_prefix(beginning))?;
    Some((declaration.split(',').next()?, declaration))
}

/// The beginning of a line in whose place a struct of kernel arguments is defined; its name follows, in parentheses.
const ARGUMENTS: &str = "KERNEL_ARGS(";

/// Adds the definition of kernel arguments, and of what they need.
fn define(name: &str, definitions: &mut Definitions) {
    let own = [step::ARGUMENTS, peak::ARGUMENTS, strided::ARGUMENTS];
    let algorithms = [softmax::ARGUMENTS, linear_attention::ARGUMENTS, linear_cross_entropy::ARGUMENTS];
    if let Some((_, define)) = own.into_iter().chain(algorithms).flatten().find(|(own, _)| *own == name) {
        define(definitions);
    }
}
