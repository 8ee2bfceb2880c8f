//! Searches for kernel instances or tile orders of GEMMs that are faster than the chosen ones.

use super::super::gpu::{Bench, COOL_DOWN};
use super::call::prepare;
use super::cases::{Operands, ProductCase, Section};
use super::floor::Work;
use crate::kernels::report::shortened;
use nibble_command::error::{Error, Result};
use nibble_command::output::{Mark, Output};
use nibble_command::say;
use nibble_core::Result as CoreResult;
use nibble_cuda::ops::products::tensor_cores::{Adds, Order, ProductTrial, TensorCoreConfig};
use nibble_train::files;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};

/// Number of candidates that are also timed at the GPU's power limit: those with the shortest bursts.
const FINALISTS: usize = 3;

/// Result of the search for one GEMM.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Found {
    chosen: TensorCoreConfig,
    chosen_ms: f64,
    best: TensorCoreConfig,
    best_ms: f64,
}

/// The mark in the file by which a later run recognises the file of trials.
pub const TRIALS: Mark = Mark::Figures("nibble bench gemm --tune");

/// Tries every candidate kernel for every GEMM. If a GEMM is already in the file of trials, only the candidate that is stored there is
/// tried. Writes the results to the file of trials. With `forced`, this function may replace a file that it cannot use.
pub fn run(bench: &Bench, chosen: &[Section], quick: bool, file: Output, forced: bool) -> Result<Value> {
    let gpu = bench.cuda.device().info().name.clone();
    let mut known = match read(&file, &gpu) {
        Err(_) if forced => BTreeMap::new(),
        read => read?,
    };
    say!("");
    say!("trials: every candidate in bursts, the {FINALISTS} fastest and the chosen one sustained; TFLOP/s");
    let products = chosen.iter().flat_map(|section| &section.products);
    let lifts = [Operands::Mxfp4, Operands::Mxfp4WeightsLift];
    for product in products.filter(|p| !p.operands.is_library() && !lifts.contains(&p.operands)) {
        let name = product.name();
        match tried(bench, product, known.get(&name).copied(), quick) {
            Ok(found) => {
                let rate = |ms| Work::of(product).tflops(ms);
                let (was, best) = (rate(found.chosen_ms), rate(found.best_ms));
                let gain = 100.0 * (best / was - 1.0);
                say!("{name:<56} {was:>5.0} → {best:>5.0} {gain:>+5.1}%  {}", found.best);
                known.insert(name, found.best);
            }
            Err(why) => say!("{name:<56} not tried: {}", shortened(&why.to_string())),
        }
    }
    let products: serde_json::Map<_, _> = known.iter().map(|(name, of)| (name.clone(), value(of))).collect();
    let found = json!({ "gpu": gpu, "products": products });
    let told = file.path().display().to_string();
    file.write(TRIALS.json(found.clone()))?;
    say!("written to {told}");
    Ok(found)
}

fn tried(
    bench: &Bench,
    product: &ProductCase,
    known: Option<TensorCoreConfig>,
    quick: bool,
) -> CoreResult<Found> {
    let mut call = prepare(&bench.cuda, product)?;
    let asked = Arc::default();
    call(&bench.cuda.with_trial(ProductTrial { config: None, asked: Some(Arc::clone(&asked)) }))?;
    let desc = asked.lock().unwrap_or_else(PoisonError::into_inner).first().copied().ok_or_else(|| {
        nibble_core::Error::shape("bench", "product", "not on the tensor cores", "one with candidates")
    })?;
    let shared = bench.cuda.device().info().shared_bytes_per_cta;
    let all = match known {
        Some(config) => vec![TensorCoreConfig::choose(&desc), config],
        None => TensorCoreConfig::candidates(&desc, shared),
    };
    let on = |config| bench.cuda.with_trial(ProductTrial { config: Some(config), asked: None });
    let mut times = Vec::new();
    for (i, &config) in all.iter().enumerate() {
        let cuda = on(config);
        times.push((i, config, bench.stopwatch.burst_ms(|| call(&cuda))?));
    }
    if !quick {
        let mut finals = Vec::new();
        for (i, config, _) in finalists(times) {
            std::thread::sleep(COOL_DOWN);
            let cuda = on(config);
            finals.push((i, config, bench.stopwatch.sustained(|| call(&cuda))?.median_ms));
        }
        times = finals;
    }
    Ok(found(&times))
}

/// The chosen candidate, which is the first, and the fastest other candidates.
fn finalists(mut times: Vec<(usize, TensorCoreConfig, f32)>) -> Vec<(usize, TensorCoreConfig, f32)> {
    times.sort_by(|a, b| (a.0 != 0, a.2).partial_cmp(&(b.0 != 0, b.2)).unwrap_or(std::cmp::Ordering::Equal));
    times.truncate(1 + FINALISTS);
    times
}

/// Selects the result; candidate 0 is the chosen one. The list must not be empty.
fn found(times: &[(usize, TensorCoreConfig, f32)]) -> Found {
    let chosen = times.iter().find(|(i, ..)| *i == 0).unwrap_or(&times[0]);
    let best = times.iter().fold(chosen, |best, one| if one.2 < best.2 { one } else { best });
    Found { chosen: chosen.1, chosen_ms: f64::from(chosen.2), best: best.1, best_ms: f64::from(best.2) }
}

fn value(config: &TensorCoreConfig) -> Value {
    let TensorCoreConfig { stages, cluster, out_buffers, out_boxes, adds, order, band } = *config;
    let (adds, order) = (format!("{adds:?}"), format!("{order:?}"));
    json!({
        "stages": stages, "cluster": cluster, "out_buffers": out_buffers, "out_boxes": out_boxes, "adds": adds, "order": order,
        "band": band,
    })
}

/// The instances that a file has for this GPU; empty if the file does not exist. Other files are refused, because their content would be
/// lost.
fn read(file: &Output, gpu: &str) -> Result<BTreeMap<String, TensorCoreConfig>> {
    let path = file.path();
    if file.is_direct() || std::fs::metadata(path).map_or(true, |there| there.len() == 0) {
        return Ok(BTreeMap::new());
    }
    let text = files::read_text(path, files::MOST_TEXT).map_err(Error::io(path))?;
    parse(&text, gpu).map_err(|why| Error::usage(format!("{}: {why}", path.display())))
}

fn parse(text: &str, gpu: &str) -> Result<BTreeMap<String, TensorCoreConfig>, String> {
    let file: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    match file["gpu"].as_str() {
        Some(of) if of == gpu => {}
        Some(of) => return Err(format!("its trials are of an {of}, but this GPU is an {gpu}")),
        None => return Err("it is not a file of trials: it names no GPU".into()),
    }
    let products = file["products"].as_object().ok_or("no `products`")?;
    let config = |(name, of): (&String, &Value)| {
        let number = |key: &str| {
            let number = of[key].as_u64().ok_or_else(|| format!("`{name}` has no `{key}`"))?;
            Ok::<_, String>(number as usize)
        };
        let config = TensorCoreConfig {
            stages: number("stages")?,
            cluster: number("cluster")?,
            out_buffers: number("out_buffers")?,
            out_boxes: number("out_boxes")?,
            adds: named(&of["adds"], [Adds::InL2, Adds::InWarp])
                .ok_or_else(|| format!("`{name}` has no `adds`"))?,
            order: named(&of["order"], [Order::FullFirst, Order::Mixed])
                .ok_or_else(|| format!("`{name}` has no `order`"))?,
            band: number("band")?,
        };
        config.check().map_err(|error| format!("`{name}`: {error}"))?;
        Ok((name.clone(), config))
    };
    products.iter().map(config).collect()
}

/// The element of `all` that the file names.
fn named<T: std::fmt::Debug, const N: usize>(of: &Value, all: [T; N]) -> Option<T> {
    all.into_iter().find(|one| of.as_str() == Some(&format!("{one:?}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn band(band: usize) -> TensorCoreConfig {
        TensorCoreConfig { band, ..TensorCoreConfig::USUAL }
    }

    #[test]
    fn the_chosen_one_is_always_a_finalist_and_stays_unless_something_is_faster() {
        let times = vec![
            (0, TensorCoreConfig::USUAL, 9.0),
            (1, band(2), 3.0),
            (2, band(4), 5.0),
            (3, band(16), 4.0),
            (4, band(32), 8.0),
        ];
        let last: Vec<usize> = finalists(times.clone()).iter().map(|(i, ..)| *i).collect();
        assert_eq!(last, [0, 1, 3, 2]);
        let best = found(&times);
        assert_eq!((best.chosen, best.best, best.best_ms), (TensorCoreConfig::USUAL, band(2), 3.0));
        assert_eq!(
            found(&[(0, TensorCoreConfig::USUAL, 1.0), (1, band(2), 1.0)]).best,
            TensorCoreConfig::USUAL
        );
    }

    #[test]
    fn what_is_written_is_read_back_on_the_same_gpu() {
        let text = json!({ "gpu": "H200", "products": { "fprop": value(&band(16)) } }).to_string();
        assert_eq!(parse(&text, "H200").unwrap(), BTreeMap::from([("fprop".to_owned(), band(16))]));
        assert!(parse(&text, "H100").unwrap_err().contains("H200"), "another GPU's");
        assert!(parse("{}", "H100").unwrap_err().contains("no GPU"), "another kind of file");
        let error = parse(&text.replace("\"band\":16", "\"bend\":16"), "H200").unwrap_err();
        assert!(error.contains("`fprop`") && error.contains("`band`"), "{error}");
        assert!(parse(&text.replace("\"cluster\":2", "\"cluster\":3"), "H200").is_err());
    }
}
