//! Maxima and minima in kernels keep a NaN of the data: `max_nan` does, `fmaxf` does not. Places that hide one are
//! listed, each with the reason why its results are right.

use std::fs;
use std::path::{Path, PathBuf};

/// Calls and instructions that return the other number where one is NaN.
const HIDING: [&str; 8] = ["fmaxf(", "fminf(", "fmax(", "fmin(", "max.f", "min.f", "max.bf16", "min.bf16"];

/// Arguments of `max(` and `min(`, which take integers and numbers, that are numbers.
const NUMBERS: [&str; 7] = ["fabsf(", "bound", ".0f", "INF", "exp2_fast(", "logf(", "read("];

/// Files, parts of their lines, and why no NaN is lost.
const LISTED: [(&str, &str, &str); 12] = [
    ("sm80_forward.cu", "top = fmaxf(top", ROW),
    ("sm80_forward.cu", "fmaxf(top, sink)", SINK),
    ("sm90a_forward.cu", "{ return fmaxf(x, y); }", ROW),
    ("sm90a_forward.cu", "fmaxf(m, sink)", SINK),
    ("swizzle.cuh", "x = fmaxf(x", ROW),
    ("swizzle.cuh", "return fmaxf(x", ROW),
    ("tokens.cu", "largest = max(largest", SCALE),
    ("sm90a_products.cu", "max(fabsf(c.slope)", SCALE),
    ("sm90a_products.cu", "bound = max(bound", SCALE),
    ("sm90a.cuh", "fmaxf(fmaf(bias, over, score), least)", BOUND),
    ("sm90a.cuh", "fabsf(score) < INF ? fminf(fmaxf(x, -LARGEST)", FINITE),
    ("sm90a_forward.cu", "fminf(even, odd) == -INF", ASKS),
];
const ROW: &str = "the largest score of a row: the weight of a NaN is NaN, and so are l and o";
const SINK: &str = "the base of the weights of a sink and a row: that of a NaN is NaN, and so is their sum";
const SCALE: &str = "a factor of products that what is not finite shall not change: it is divided out again";
const FINITE: &str = "a sum of two finite numbers";
const ASKS: &str = "a question whether one of two is −∞, whatever the other is; both stay as they are";
const BOUND: &str = "a sum of two numbers and a bound, which is NaN where one of the two is not finite";

/// The texts of a folder and its folders.
fn files(folder: &Path, all: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { files(&path, all) } else { all.push(path) }
    }
}

/// The arguments of each call of a function in a line, and what follows.
fn calls<'a>(line: &'a str, name: &'a str) -> impl Iterator<Item = &'a str> {
    let is_word = |at: usize| line[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
    let places = line.match_indices(name).filter(move |(at, _)| !is_word(*at));
    places.map(move |(at, _)| &line[at + name.len()..])
}

/// True of a line that takes a maximum or minimum which hides a NaN.
fn hides(line: &str) -> bool {
    let code = line.split("//").next().unwrap_or_default();
    let of_numbers = |rest: &str| {
        // Up to the parenthesis that ends the call.
        let mut open = 1;
        let end = rest.find(|c| {
            open += i32::from(c == '(') - i32::from(c == ')');
            open == 0
        });
        NUMBERS.iter().any(|number| rest[..end.unwrap_or(rest.len())].contains(number))
    };
    HIDING.iter().any(|name| calls(code, name).next().is_some())
        || ["max(", "min("].iter().any(|name| calls(code, name).any(of_numbers))
}

#[test]
fn no_maximum_of_data_hides_a_nan() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/kernels");
    let (mut paths, mut found, mut used) = (Vec::new(), Vec::new(), vec![false; LISTED.len()]);
    files(&folder, &mut paths);
    assert!(paths.len() > 40, "{}", paths.len());
    for path in paths {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        for (number, line) in fs::read_to_string(&path).unwrap().lines().enumerate() {
            if !hides(line) {
                continue;
            }
            let entry = LISTED.iter().position(|(file, part, _)| *file == name && line.contains(part));
            match entry {
                Some(entry) => used[entry] = true,
                None => found.push(format!("{name}:{}: {}", number + 1, line.trim())),
            }
        }
    }
    assert!(found.is_empty(), "these may hide a NaN of the data:\n{}", found.join("\n"));
    let unused: Vec<_> = LISTED.iter().zip(used).filter(|(_, used)| !used).collect();
    assert!(unused.is_empty(), "nothing is there any more: {unused:?}");
}

#[test]
fn maxima_of_integers_and_of_max_nan_hide_none() {
    for line in ["x = fmaxf(x, y);", "y = max(fabsf(x), 1.0f);", "max.f32 %0", "z = max(a(1), read(x));"] {
        assert!(hides(line), "{line}");
    }
    for line in ["x = max_nan(x, y);", "max.NaN.f32 %0", "i = max(0, n); y = fabsf(x);", "// fmaxf(x, y)"] {
        assert!(!hides(line), "{line}");
    }
}
