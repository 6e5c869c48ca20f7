"""The words of the report in Chinese; their English is the key. Curves are called as in metrics.jsonl."""

ENGLISH = {
    "bleu": "validation BLEU (smoothed)",
    "utilisation_percent": "utilisation",
    "memory_gib": "memory",
    "power_watt": "power",
    "temperature_celsius": "temperature",
    "model_flops_utilisation": "model FLOPs utilisation",
}

CHINESE = {
    # headings
    "Training report": "训练报告", "What is missing": "缺少的内容", "Summary": "概览", "Environment": "运行环境",
    "Data": "数据", "Model": "模型", "Training curves": "训练曲线", "Hardware over time": "硬件使用情况（随时间）",
    "Speed": "速度", "Results": "评测结果", "Translations": "译文对照", "Cross-attention": "交叉注意力",
    "Paired bootstrap": "配对自助重采样检验", "Settings": "全部设置", "Pictures of the run": "实验自带的图",
    # table rows
    "run": "实验", "status": "状态", "under way": "正在运行",
    "no last words": "没有正常结束", "time": "总用时", "steps": "步数", "begun": "开始时间", "command": "命令", "commit": "代码版本（commit）",
    "GPU": "GPU", "GPU memory (GiB)": "显存（GiB）", "driver": "驱动", "CPU": "CPU", "cores": "核数", "threads": "线程数",
    "processes": "进程数", "system": "系统", "resumed by": "继续的命令",
    "parameters": "参数量", "best validation loss": "最好的验证损失", "best validation perplexity": "最好的验证困惑度",
    "best validation BLEU (smoothed)": "最好的验证 BLEU（平滑）", "last training loss": "最后的训练损失",
    "test accuracy": "测试准确率", "test errors": "测试错误数",
    "data set": "数据集", "pairs read": "读入句对", "pairs kept": "保留句对",
    "pairs kept while the rate falls": "学习率下降时保留的句对", "tokens": "词元数", "vocabulary": "词表大小",
    "unknown tokens": "未知词元比例", "validation rows": "验证集行数",
    "with an empty side": "有一侧为空", "with source = target": "原文与译文相同", "moved to validation or test": "划入验证集或测试集",
    "with a side that is also in validation or test": "有一侧也在验证集或测试集中", "exact duplicates": "完全重复",
    "longer than --max_length": "超过 --max_length", "with very different lengths": "两侧长度相差太大",
    "unlike validation's (--match_domain)": "用词与验证集不像（--match_domain）",
    "with a short target (--match_lengths)": "译文偏短（--match_lengths）",
    "FLOPs of a training pair": "每个训练句对的浮点运算",
    "FLOPs of a training token": "每个训练词元的浮点运算",
    "FLOPs of a training image": "每张训练图像的浮点运算", "source": "原文", "target": "译文",
    "tokens per second": "每秒词元数", "target tokens per second": "每秒目标词元数", "images per second": "每秒图片数",
    "model FLOPs utilisation": "模型算力利用率（MFU）", "padding": "填充比例", "waiting for data": "等待数据的时间比例",
    "median": "中位数", "mean": "平均", "highest": "最高", "peak memory (GiB)": "内存峰值（GiB；在 GPU 上是显存）",
    # results
    "BLEU (nltk, graded)": "BLEU（nltk，课程打分）", "lower end of the interval": "95 % 区间下限", "upper end of the interval": "95 % 区间上限",
    "uncased": "不分大小写", "signature": "签名", "brevity penalty": "过短惩罚", "length ratio": "长度比",
    "sentences": "句数", "decoding": "解码方式", "checkpoint": "检查点", "outputs cut at the length limit": "写到长度上限仍未结束的句数",
    "score": "得分", "reference": "参考译文", "best": "最好", "middle": "居中", "worst": "最差",
    "p-value": "p 值", "metric": "指标",
    # figures
    "loss": "损失", "perplexity": "困惑度", "bleu": "验证 BLEU（平滑）", "error rate": "错误率", "accuracy": "准确率", "learning_rate": "学习率",
    "gradient_norm": "梯度范数", "tokens_per_second": "每秒词元数", "images_per_second": "每秒图片数",
    "model_flops_utilisation": "模型算力利用率（MFU）", "padding_share": "填充比例", "wait_share": "等待数据的时间比例",
    "step": "步", "training": "训练", "validation": "验证", "test": "测试", "training, smoothed": "训练（标签平滑）", "minutes": "分钟",
    "utilisation_percent": "利用率", "memory_gib": "内存", "power_watt": "功率", "temperature_celsius": "温度",
    "entropy": "采样分布的熵", "effective_sample_size": "有效样本数", "weight": "动态采样的权重",
    "sentence lengths": "训练句子的长度", "bubble_share": "气泡比例", "peak_gib": "内存峰值（GiB；在 GPU 上是显存）", "loss_scale": "损失缩放",
    # sentences
    "Hover over a number to see the file it is from.": "鼠标停在数字上，可以看到它来自哪个文件。",
    "Losses are in nats a token, without label smoothing unless it says so; validation BLEU is smoothed and of the first rows only.":
        "损失以 nat/词元 计，除注明外不含标签平滑；验证 BLEU 是平滑过的，只算前若干行。",
    "100 % of the CPU is one core.": "CPU 的 100 % 指一个核。",
    "Columns: source; rows: translation. The darker, the more the last layer looked there.":
        "列为原文，行为译文；颜色越深，最后一层对该处的注意力越大。",
    "Scores of single sentences are sacreBLEU's sentence BLEU, for reading only: the mean of them is not the corpus BLEU.":
        "单句得分是 sacreBLEU 的 sentence BLEU，只供阅读参考：它们的平均不是语料级 BLEU。",
    "As sacreBLEU does it: both systems on the same resampled rows. p counts one direction: under 0.025 the difference "
    "is hardly chance.":
        "按 sacreBLEU 的做法：两个系统在同样的重采样行上比较。p 只算一个方向，小于 0.025 时，差别不大可能是偶然。",
    "Only what differs between the runs is marked.": "各实验之间不同的设置已标出。",
    "not there": "没有这个文件", "damaged": "已损坏", "end": "结束", "no result yet": "还没有评测结果", "this makes one": "评测的命令",
    "the settings are unknown": "不知道设置", "the sizes of the model are unknown": "不知道模型大小",
    "counts and lengths of the data are unknown": "不知道数据的数量与长度", "the machine is unknown": "不知道运行的机器",
    "what it said is unknown": "不知道运行时的输出", "there are no curves": "没有曲线", "that result is left out": "略去这个结果",
    "the run is still under way: these are its figures so far": "实验仍在运行，以下是到目前为止的数字",
    "no last words: the run was killed, or ended with an error": "没有结束语：实验被强行终止，或因错误结束",
    "of an older version: these are of the smoothed loss": "旧版本的记录：这是带标签平滑的损失",
    "of an earlier checkpoint than the best; run evaluate.py again": "这个结果属于较早的检查点，不是最好的；请重新运行 evaluate.py",
    "damaged lines are left out": "行损坏，已略去", "so the translations are not shown": "所以不显示译文",
}  # fmt: skip
