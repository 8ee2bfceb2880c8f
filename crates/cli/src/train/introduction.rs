//! The introduction of a run before its first step: a few lines for the console, and full details for the log.

use crate::tensor_cores;
use nibble_command::console::{bytes, thousands};
use nibble_core::DeviceKind;
use nibble_train::checks::notes;
use nibble_train::config::Config;
use nibble_train::data::Entropy;
use nibble_train::plan::{self, Least, Prediction, Recomputed, overrides};
use nibble_train::trainer::{MEMORY_FILE, Start};
use std::collections::BTreeMap;
use std::path::Path;

/// The lines for the console: at most eight, together with the line for the device.
pub fn short(start: &Start<'_>) -> Vec<String> {
    let prediction = start.prediction;
    let mut lines = what(start);
    let most = bytes(prediction.device_bytes() as u64);
    let takes = match balanced(start) {
        Some(balanced) => format!("{} with balanced routing, {most} at most,", bytes(balanced)),
        None => most,
    };
    lines.push(format!(
        "memory, as predicted: {takes} {}; a forward pass keeps {} (parts: {})",
        whose(prediction.kind, prediction.mesh.ranks()),
        bytes(prediction.ledger.bytes() as u64),
        Path::new(&start.config.run.dir).join(MEMORY_FILE).display()
    ));
    lines.extend(off_the_tensor_cores(start));
    lines.extend((start.step > 0).then(|| format!("continuing after step {}", thousands(start.step))));
    lines
}

/// The lines for the log: all configuration keys, and the memory of each part and each tensor.
pub fn all(start: &Start<'_>) -> Vec<String> {
    let mut lines = vec!["config:".to_owned()];
    lines.extend(settings(start.config));
    lines.extend(what(start));
    lines.push(format!(
        "arithmetic of a token, forward and backward: {:.2} Mflop",
        start.config.flops_per_token() / 1e6
    ));
    lines.extend(memory(start.prediction));
    let balanced = balanced(start);
    lines.extend(
        balanced.map(|balanced| format!("  {:<34} {:>10}", "  with balanced routing", bytes(balanced))),
    );
    lines.extend(off_the_tensor_cores(start));
    lines
}

/// Predicted bytes of a device with balanced routing; `None` if the prediction already assumes balanced routing.
fn balanced(start: &Start<'_>) -> Option<u64> {
    let of = start.prediction;
    // An error cannot occur here, because the same prediction has already succeeded.
    let balanced = plan::predict_balanced(of.kind, of.mesh, start.config, start.recipe).ok()??;
    Some(Prediction { host_ranks: of.host_ranks, ..balanced }.device_bytes() as u64)
}

/// Lines on the recipe, the parameters and the data.
fn what(start: &Start<'_>) -> Vec<String> {
    let mut lines = vec![
        format!("recipe: {}: {}", start.recipe.name, start.recipe.description),
        format!("parameters: {}", thousands(start.prediction.parameters as u64)),
    ];
    lines.push(match start.entropy {
        Some(Entropy { rate, unigram }) => {
            format!(
                "data: entropy H {rate:.4} nats a token (the floor), {unigram:.4} for frequencies alone (U)"
            )
        }
        None => format!("data: {}", start.config.data.described()),
    });
    let forced = "train.force_load_balance assigns experts in turn, whatever routers say: for measuring speed, nothing useful is learnt";
    lines.extend(start.config.train.force_load_balance.then(|| forced.to_owned()));
    lines.extend(notes(start.config, start.recipe));
    lines
}

/// One line for all GEMMs that would run without tensor cores.
fn off_the_tensor_cores(start: &Start<'_>) -> Option<String> {
    let missed = match start.prediction.kind {
        DeviceKind::Gpu => tensor_cores::missed(start.config, start.recipe),
        DeviceKind::Host => Vec::new(),
    };
    (!missed.is_empty()).then(|| format!("off the tensor cores: {}", missed.join("; ")))
}

/// Names the device to which the memory belongs.
fn whose(kind: DeviceKind, ranks: usize) -> &'static str {
    match (kind, ranks) {
        (DeviceKind::Gpu, 2..) => "of each GPU",
        (DeviceKind::Gpu, _) => "of the GPU",
        (DeviceKind::Host, _) => "of the host",
    }
}

/// The memory of a run, listed by part and by tensor.
pub fn memory(prediction: &Prediction) -> Vec<String> {
    let of = if prediction.mesh.ranks() > 1 { format!(", rank {}", prediction.rank) } else { String::new() };
    let ledger = &prediction.ledger;
    let mut lines =
        vec![format!("kept by a forward pass for its backward pass{of}: {}", bytes(ledger.bytes() as u64))];
    lines.extend(ledger.table().lines().map(|line| format!("  {line}")));
    lines.push(format!("memory{of}, as predicted:"));
    for (part, size) in prediction.parts().into_iter().chain([prediction.allowance()]) {
        lines.push(format!("  {part:<34} {:>10}", bytes(size as u64)));
    }
    let all = format!("in all, {}", whose(prediction.kind, prediction.mesh.ranks()));
    lines.push(format!("  {all:<34} {:>10}", bytes(prediction.device_bytes() as u64)));
    lines
}

/// The kinds of traffic between ranks, each with its collectives.
const SENT: [(&str, &[&str]); 4] = [
    ("rows to experts and back", &["all_to_all_v", "counts"]),
    ("gradients", &["reduce_scatter_tree"]),
    ("weights, and sums for the norm", &["all_gather_parts"]),
    ("losses and counts", &["all_gather", "all_gather_f64"]),
];

/// Lines that state how many bytes a rank sends to other ranks in each step.
pub fn sent(rank: usize, bytes_by_call: &BTreeMap<&'static str, u64>) -> Vec<String> {
    let of = |(what, calls): &(&str, &[&str])| {
        let sent = calls.iter().filter_map(|call| bytes_by_call.get(call)).sum();
        format!("  {what:<34} {:>10}", bytes(sent))
    };
    let title = format!("sent to other ranks in a step, rank {rank}, with balanced routing:");
    std::iter::once(title).chain(SENT.iter().map(of)).collect()
}

/// Lines with the memory of each kind of rank.
pub fn ranks(kinds: &[(Vec<usize>, usize)]) -> Vec<String> {
    let of = |(ranks, taken): &(Vec<usize>, usize)| {
        let ranks = ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
        format!("  {:<34} {:>10}", format!("ranks {ranks}"), bytes(*taken as u64))
    };
    std::iter::once("memory of each rank:".to_owned()).chain(kinds.iter().map(of)).collect()
}

/// Lines with the least recomputation with which the run fits a memory limit in bytes.
pub fn least(found: &Least, recipe: &str, limit: usize) -> Vec<String> {
    let size = |n: usize| bytes(n as u64);
    let line = |what: &str, Recomputed { bytes, extra, .. }: &Recomputed| {
        // Without a sign of zero.
        let share = (1000.0 * extra.seconds / found.step_seconds).round() / 10.0 + 0.0;
        format!(
            "  {what:<22} {:>10}, {:>8.2} Tflop and {:>7.2} ms more a step at an H200's peak rates ({share:+.1} %)",
            size(*bytes),
            extra.flops / 1e12,
            (1e5 * extra.seconds).round() / 100.0 + 0.0
        )
    };
    let limit = format!("{} bytes ({})", thousands(limit as u64), size(limit));
    let mut lines = match &found.fits {
        Some(fits) => vec![
            format!(
                "least recomputation of {recipe} within {limit}: {}",
                overrides(&[fits.recompute.setting()])
            ),
            line("with it", fits),
        ],
        None => vec![
            format!("no recomputation of {recipe} fits {limit}"),
            line(&format!("least memory: {}", found.smallest.recompute), &found.smallest),
        ],
    };
    lines.push(line("nothing recomputed", &found.nothing));
    lines
}

/// Lines with the supported GPUs on which the run fits.
pub fn gpus(prediction: &Prediction) -> String {
    let needed = prediction.device_bytes();
    let (fits, not): (Vec<_>, Vec<_>) = plan::GPUS.iter().partition(|gpu| needed <= gpu.bytes);
    let names = |gpus: &[&plan::Gpu]| gpus.iter().map(|gpu| gpu.name).collect::<Vec<_>>().join(", ");
    match (fits.is_empty(), not.is_empty()) {
        (true, _) => format!("fits on none of {}", names(&not)),
        (_, true) => format!("fits on {}", names(&fits)),
        _ => format!("fits on {}; not on {}", names(&fits), names(&not)),
    }
}

/// All keys of the configuration, one table per line; long lines are broken.
fn settings(config: &Config) -> Vec<String> {
    const WIDTH: usize = 79;
    // Every loaded configuration has a TOML form, so this always succeeds.
    let Ok(toml::Value::Table(table)) = toml::Value::try_from(config) else { return Vec::new() };
    let (tables, top): (Vec<_>, Vec<_>) = table.iter().partition(|(_, value)| value.is_table());
    let sections =
        tables.iter().filter_map(|(name, value)| Some((name.as_str(), value.as_table()?.iter().collect())));
    let mut lines = Vec::new();
    for (name, values) in std::iter::once(("", top)).chain(sections) {
        let mut line = format!("  {name:<10}");
        for (key, value) in values {
            let item = format!(" {key}={value}");
            if line.len() + item.len() > WIDTH {
                lines.push(std::mem::replace(&mut line, format!("  {:<10}", "")));
            }
            line += &item;
        }
        lines.push(line);
    }
    lines
}
